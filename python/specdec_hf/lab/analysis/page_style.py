"""Style and script of the page that page.py makes."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --text: #1c2024; --faint: #5b6470; --line: #d5dae0; --card: #f6f8fa;
  --accepted: #0f6b33; --accepted-ground: #ddf4e4;
  --rejected: #b3261e; --rejected-ground: #fde7e6;
  --recovered: #0a4fb3; --recovered-ground: #dfeafd;
  --bonus: #6b4a00; --bonus-ground: #fbf0d3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --text: #e7eaee; --faint: #a4adb8; --line: #3a424c; --card: #20252b;
    --accepted: #7ee2a0; --accepted-ground: #143322;
    --rejected: #ff9a92; --rejected-ground: #431a18;
    --recovered: #9cc2ff; --recovered-ground: #16294a;
    --bonus: #f2cf7a; --bonus-ground: #3a2e10;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 17rem; max-width: 62rem; background: var(--ground);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .75rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
header p { color: var(--faint); }
dl, dd { margin: 0; }
header dl { display: flex; flex-wrap: wrap; gap: .25rem 2rem; }
header dt { color: var(--faint); font-size: .85rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .35rem 1.5rem; padding: 0;
  margin: 1rem 0; }
.legend .token { cursor: default; }
.prompt { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card);
  border-left: 3px solid var(--line); padding: .6rem .9rem; margin: 0 0 1rem; }
.rounds { font: .95rem/1.9 ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace;
  padding-left: 3.2rem; margin: 0; }
.rounds li { padding-left: .5rem; border-bottom: 1px solid var(--line); }
.rounds li::marker { color: var(--faint); font-size: .8rem; }
.token { white-space: pre-wrap; overflow-wrap: anywhere; padding: .1rem 0; cursor: help;
  border-radius: .15rem; margin-right: 1px; }
.accepted { color: var(--accepted); background: var(--accepted-ground); }
.rejected { color: var(--rejected); background: var(--rejected-ground);
  text-decoration: line-through; }
.recovered { color: var(--recovered); background: var(--recovered-ground);
  text-decoration: underline double; text-underline-offset: .2em; }
.bonus { color: var(--bonus); background: var(--bonus-ground); text-decoration: underline dotted;
  text-underline-offset: .2em; }
.rounds .token:hover, .token:focus { outline: 2px solid currentColor; outline-offset: 1px; }
.details { display: none; position: fixed; z-index: 1; right: 1rem; bottom: 1rem; width: 25rem;
  max-width: calc(100vw - 2rem); padding: .75rem 1rem; background: var(--card);
  color: var(--text); border: 1px solid var(--line); border-radius: .5rem;
  box-shadow: 0 4px 18px rgb(0 0 0 / .28); font: .9rem/1.5 system-ui, sans-serif;
  text-decoration: none; white-space: normal; }
.details strong { display: block; margin-bottom: .35rem; }
.details div { display: flex; justify-content: space-between; gap: 1rem; }
.details dt { color: var(--faint); }
.details dd { font-variant-numeric: tabular-nums; text-align: right; overflow-wrap: anywhere; }
.token:hover > .details, .token:focus > .details { display: block; }
.rounds:hover .token:focus:not(:hover) > .details { display: none; }
.hidden .details { display: none !important; }
"""

SCRIPT = """
const tokens = [...document.querySelectorAll('.rounds .token')];
const show = () => document.body.classList.remove('hidden');
document.addEventListener('keydown', event => {
  if (event.key === 'Escape') document.body.classList.add('hidden');
  const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  const here = tokens.indexOf(document.activeElement);
  if (move && here >= 0 && tokens[here + move]) {
    tokens[here + move].focus();
    event.preventDefault();
  }
});
document.addEventListener('focusin', show);
document.addEventListener('mouseover', event => {
  if (event.target.closest('.rounds .token')) show();
});
"""

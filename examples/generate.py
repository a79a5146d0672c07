"""The decoding loop in a few lines: the default drafter on the embedded model, step by step."""

from specdec_hf import SpeculativeDecoder
from specdec_hf.cli.weights import load_embedded

model, tokenizer = load_embedded()
question = "Repeat this twice: the cat sat on the mat and the dog lay by the door."
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": question}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)  # fmt: skip
decoder = SpeculativeDecoder()
for step in decoder.stream(model, **inputs, max_new_tokens=48, do_sample=False):
    text = tokenizer.decode(step.tokens, skip_special_tokens=True)
    print(f"{sum(step.from_draft)} accepted: {text!r}")

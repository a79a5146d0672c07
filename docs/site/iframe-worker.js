// Browsers start no worker in a page that is opened as a file. There the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const inner = this.inside.document;
      inner.open();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.write("<!doctype html><title>search</title><body>");
      const element = inner.createElement("script");
      element.src = new URL(script, location.href);
      this.loaded = new Promise((loaded) => element.addEventListener("load", loaded));
      inner.body.append(element);
      inner.close();
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}

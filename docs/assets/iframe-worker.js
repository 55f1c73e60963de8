// To pages that are opened as files browsers refuse workers, in which the search runs. There the script of one runs in a
// hidden frame, which has a global scope of its own; `onmessage` and `postMessage` are all that the search needs.
if (location.protocol === "file:") {
  const send = (target, data) => {
    const message = new MessageEvent("message", { data: structuredClone(data) });
    setTimeout(() => target.onmessage?.(message));
  };
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const script = document.createElement("script");
      script.src = new URL(address, location.href).href;
      this.frame.srcdoc = script.outerHTML;
      this.scope = new Promise(ready => this.frame.addEventListener("load", () => {
        const scope = this.frame.contentWindow;
        scope.postMessage = data => send(this, data);
        ready(scope);
      }, { once: true }));
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.scope.then(scope => send(scope, data));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

// The search of Material runs in a Worker, which browsers refuse to pages that are opened as files. There
// this Worker runs its script in a hidden frame of the page. The offline plugin would otherwise load one
// from another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];  // messages from before the script was loaded
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.addEventListener("load", () => {
        const inner = frame.contentWindow;
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
        const script = inner.document.createElement("script");
        script.src = url;
        script.addEventListener("load", () => {
          this.inner = inner;
          for (const data of this.waiting) this.postMessage(data);
        });
        inner.document.body.append(script);
      }, {once: true});
      document.body.append(frame);
    }

    postMessage(data) {
      if (!this.inner) {
        this.waiting.push(data);
        return;
      }
      this.inner.dispatchEvent(new this.inner.MessageEvent("message", {data}));
    }

    terminate() {}
  };
}

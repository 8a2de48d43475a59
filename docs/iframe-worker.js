// Search when the site is opened from the disk, where browsers start no workers: the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = resolve;
        this.inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  };
}

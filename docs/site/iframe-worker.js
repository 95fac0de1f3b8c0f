// Browsers refuse web workers on pages that are opened as files. Search needs one, so here a hidden frame does
// the work of a worker: it runs the script, and messages go back and forth.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>
        self.postMessage = data => parent.postMessage(data, "*");
        self.importScripts = (...urls) => Promise.all(urls.map(url => new Promise((resolve, reject) => {
          const script = document.createElement("script");
          Object.assign(script, {src: url, onload: resolve, onerror: reject});
          document.body.append(script);
        })));
      <\/script><body><script src="${new URL(url, location.href)}"><\/script></body>`;
      this.waiting = [];
      this.frame = frame;
      window.addEventListener("message", event => {
        if (event.source !== frame.contentWindow) return;
        const message = new MessageEvent("message", {data: event.data});
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      frame.addEventListener("load", () => {
        for (const data of this.waiting.splice(0)) this.send(data);
        this.isLoaded = true;
      });
      document.body.append(frame);
    }

    postMessage(data) {
      if (this.isLoaded) this.send(data);
      else this.waiting.push(data);
    }

    send(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

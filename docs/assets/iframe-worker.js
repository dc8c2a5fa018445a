/*
 * Search runs in a worker, and browsers start none for pages from the disk (file:). There, and only
 * there, a hidden frame stands in for it: the same script, the same messages, the same thread.
 */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...scripts) => {
        for (const each of scripts) await this.load(each);
      };
      this.ready = this.load(script);
    }

    load(script) {
      return new Promise((done, failed) => {
        const element = this.frame.contentDocument.createElement("script");
        element.src = script;
        element.onload = done;
        element.onerror = failed;
        this.frame.contentDocument.head.append(element);
      });
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

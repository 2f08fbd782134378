// SPDX-License-Identifier: Apache-2.0
// Pages that are opened as files may not start workers. Search needs one: here it runs in a hidden
// frame of the page instead. Over HTTP the browser's own worker is used.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const home = new URL(url, document.baseURI);
      const load = (source) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: new URL(source, home), onload: done, onerror: failed });
        inside.document.body.append(script);
      });
      inside.importScripts = (...sources) => Promise.all(sources.map(load));
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(home);
      this.inside = inside;
    }
    postMessage(data) {
      const event = () => new this.inside.MessageEvent("message", { data });
      this.ready = this.ready.then(() => this.inside.dispatchEvent(event()));
    }
    terminate() { this.inside.frameElement.remove(); }
  };
}

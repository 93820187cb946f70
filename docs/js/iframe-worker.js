// A page that is read from the disk may not start workers, and the search is one. Run it in a hidden frame there.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      this.listener = new Promise((ready) => { inside.addEventListener = (_, listener) => ready(listener); });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = address;
      inside.document.body.append(script);
    }

    postMessage(data) { this.listener.then((listener) => listener({ data })); }
  };

// Around the terminal emulator: where its websocket is, how large its letters are, who has the keyboard, and why a window
// ended.
(() => {
  "use strict";
  const asked = Number(new URLSearchParams(window.location.search).get("fontsize"));
  const fontSize = asked >= 6 && asked <= 64 ? Math.round(asked) : 16;

  // The emulator takes keys only while an element of its own has the focus, of which it tells the server.
  let open = false;
  const takeKeyboard = () => {
    if (open) {
      document.querySelector(".xterm-helper-textarea").focus();
    }
  };
  window.addEventListener("focus", takeKeyboard);
  window.addEventListener("pageshow", takeKeyboard);

  const Socket = window.WebSocket;
  window.WebSocket = class extends Socket {
    constructor(...args) {
      super(...args);
      this.addEventListener("open", () => {
        open = true;
        takeKeyboard();
      });
      this.addEventListener("close", (event) => {
        if (event.reason) {
          document.getElementById("why").textContent = event.reason;
        }
        open = false;
        document.body.classList.add("-closed");
        document.getElementById("again").focus();
      });
    }
  };

  document.addEventListener("DOMContentLoaded", () => {
    const socket = new URL("ws", window.location.href);
    socket.protocol = "ws:";
    socket.search = "";
    const terminal = document.getElementById("terminal");
    terminal.dataset.sessionWebsocketUrl = socket.href;
    terminal.dataset.fontSize = String(fontSize);
    document.getElementById("again").addEventListener("click", () => window.location.reload());
  });
})();

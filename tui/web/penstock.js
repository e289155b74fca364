// Before the terminal emulator begins: where its websocket is, how large its letters are, and why a window ended.
(() => {
  "use strict";
  const asked = Number(new URLSearchParams(window.location.search).get("fontsize"));
  const fontSize = asked >= 6 && asked <= 64 ? Math.round(asked) : 16;

  const Socket = window.WebSocket;
  window.WebSocket = class extends Socket {
    constructor(...args) {
      super(...args);
      this.addEventListener("close", (event) => {
        if (event.reason) {
          document.getElementById("why").textContent = event.reason;
        }
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

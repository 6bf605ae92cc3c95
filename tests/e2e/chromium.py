"""A headless Chromium, driven by the DevTools protocol over a pipe: no driver and no library is needed."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time

PATIENCE = 60  # seconds; only a hang is ever that slow
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--mute-audio",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
    *("--disable-extensions", "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
]
# The browser reads commands from descriptor 3 and writes replies to descriptor 4.
START = """
import os, sys
os.dup2(int(sys.argv[1]), 100), os.dup2(int(sys.argv[2]), 101), os.dup2(100, 3), os.dup2(101, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """One browser with one page. `messages` has what the page logged, `requests` the addresses that it asked."""

    def __init__(self, profile):
        to_browser, self.commands = os.pipe()
        self.replies, from_browser = os.pipe()
        flags = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-IS", "-c", START, str(to_browser), str(from_browser), *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.rest, self.messages, self.requests, self.session = 0, b"", [], [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.replies)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        while True:
            reply = self.read()
            if reply.get("id") == self.number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]

    def read(self):
        while b"\0" not in self.rest:
            block = os.read(self.replies, 2**20)
            assert block, "the browser has ended"
            self.rest += block
        line, _, self.rest = self.rest.partition(b"\0")
        found = json.loads(line)
        method, params = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Log.entryAdded":
            self.messages.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return found

    def evaluate(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, address):
        """Load an address anew, even one that differs only after the number sign."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)

    def wait(self, condition):
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + PATIENCE
        tried = f"(() => {{ try {{ return !!({condition}); }} catch {{ return false; }} }})()"
        while not self.evaluate(tried):
            assert self.process.poll() is None, "the browser has ended"
            assert time.monotonic() < deadline, f"it did not happen: {condition}; {self.messages}; {self.text()[:2000]}"
            time.sleep(0.02)

    def text(self):
        return self.evaluate("document.body ? document.body.innerText : ''")

    def size(self, width, height, scale=1, mobile=False):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    def colours(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            more = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def drag(self, element, start, end):
        """Drag the mouse over an element, from one share of its width to another."""
        inside = "{ const r = e.getBoundingClientRect(); return [r.left, r.top + r.height / 2, r.width]; }"
        self.evaluate(f"{element}.scrollIntoView()")
        left, top, width = self.evaluate(f"(e => {inside})({element})")
        moves = [("mouseMoved", start), ("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)]
        for kind, share in moves:
            held = {"button": "left", "buttons": 1, "clickCount": 1} if kind != "mouseMoved" or share == end else {}
            self.call("Input.dispatchMouseEvent", type=kind, x=left + share * width, y=top, **held)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

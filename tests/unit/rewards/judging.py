"""A real HTTP server that plays a judge: fair, biased, slow, broken."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

BLOCK = re.compile(r"\[(prompt|reference answer|completion)(?: (\w+))? ([0-9a-f]{12})\]\n(.*?)\n\[end \3\]", re.DOTALL)


def quality(text):
    """What a fair judge sees: the number behind q."""
    return int(re.search(r"q(-?\d+)", text)[1])


PREFERENCES = {"fair": quality, "longer": len, "first": lambda _: 0}


class JudgeHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append(asked | {"authorization": self.headers.get("Authorization")})
            number = len(server.asked)
        blocks = BLOCK.findall(asked["messages"][-1]["content"])
        texts = [text for kind, _, _, text in blocks if kind == "completion"]
        style = self.path.split("/")[1]
        joined = " ".join(texts)
        if "hang" in joined:
            server.release.wait(60)
            return None
        if "drip" in joined:  # a byte now and then: no single read takes long
            self.send_response(200)
            self.end_headers()
            while not server.release.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()
            return None
        if "garbage" in joined:
            return self.say("I like it!")
        if "refuse" in joined:
            return self.say(None, refusal="I cannot judge this.")
        if "html" in joined:
            return self.send(b"<html>")
        if "reset" in joined:
            self.connection.close()
            return None
        if "limit" in joined or (style == "busy" and number < 3):
            return self.send(b"slow down", 429, {"Retry-After": "0.01"})
        if style == "noschema" and "response_format" in asked:
            return self.send(b"unknown field response_format", 400)
        return self.say(json.dumps({"explanation": f"seen {len(texts)}"} | self.verdict(style, texts)))

    def verdict(self, style, texts):
        prefer = PREFERENCES.get(style, quality)
        mode = self.server.mode
        if mode == "pointwise":
            return {"scores": {"quality": max(1, min(100 if style == "longer" else 10, prefer(texts[0])))}}
        order = sorted(range(len(texts)), key=lambda index: -prefer(texts[index]))  # stable: the first of equal ones
        if mode == "ranking":
            return {"ranking": [index + 1 for index in order]}
        tie = style != "first" and prefer(texts[0]) == prefer(texts[1])
        return {"winner": "tie" if tie else "AB"[order[0]]}

    def say(self, text, **message):
        content = {"role": "assistant", "content": text} | message
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        reply = {"choices": [{"message": content, "finish_reason": "stop"}], "usage": usage}
        self.send(json.dumps(reply).encode())

    def send(self, body, status=200, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def judging():
    """A running server with `asked`, the requests so far, and `mode`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), JudgeHandler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # clients that gave up
    server.asked, server.release, server.lock, server.mode = [], threading.Event(), threading.Lock(), "pointwise"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


def write_rubric(folder, server, style="fair", mode="pointwise", **more):
    """Write a rubric for a server and return the reward's name."""
    server.mode = mode
    entries = {
        "mode": mode,
        "base_url": f"http://127.0.0.1:{server.server_port}/{style}/v1",
        "model": "judge",
        "criteria": [{"name": "quality", "description": "It is good."}],
        "cache": str(folder / "cache"),
        "attempts": 2,
    }
    file = folder / f"{style}_{mode}.yaml"
    file.write_text(yaml.safe_dump(entries | more))
    return f"judge:{file}"

import pytest

pytest.importorskip("starlette", reason="the server needs starlette and uvicorn")
pytest.importorskip("uvicorn", reason="the server needs starlette and uvicorn")

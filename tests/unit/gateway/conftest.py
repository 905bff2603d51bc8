"""What every gateway test needs."""

import pytest


@pytest.fixture(autouse=True)
def proxy_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that answers nobody: an internal call that used it would fail (case E6)."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

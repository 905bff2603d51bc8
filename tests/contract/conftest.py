"""A real vLLM replica for the modules that look at one, of each version that has an environment here.

`.ci/setup all` makes both environments. A module has one replica of each, unless it makes its own.
"""

from collections.abc import Iterator

import openai
import pytest

from tests.contract import engine_vllm


@pytest.fixture(scope="module", params=[engine_vllm.NEWEST, engine_vllm.BEFORE])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> engine_vllm.ForkServer:
    return engine_vllm.shared(request, request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def replica(server: engine_vllm.ForkServer) -> Iterator[engine_vllm.Replica]:
    models = server.folder
    adapters = {name: str(models / f"tiny-{name}") for name in ("formal", "rhyme")}
    begun = engine_vllm.begin(server, engine_vllm.spec(models, adapters=adapters))
    yield engine_vllm.listening(server, begun)
    engine_vllm.stop(server, begun)


@pytest.fixture(scope="module")
def spelling(replica: engine_vllm.Replica, server: engine_vllm.ForkServer) -> engine_vllm.Spelling:
    return engine_vllm.Spelling(str(server.folder / "tiny"))


@pytest.fixture
def client(replica: engine_vllm.Replica) -> Iterator[openai.OpenAI]:
    with (
        openai.DefaultHttpxClient(trust_env=False, verify=False, timeout=60) as http,
        openai.OpenAI(
            base_url=f"{replica.url}/v1",
            api_key=engine_vllm.SECRET,
            http_client=http,
            max_retries=0,
        ) as found,
    ):
        yield found

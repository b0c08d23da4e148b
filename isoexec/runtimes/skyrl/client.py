"""The driver's and the policy worker's way to the engines."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

from isoexec.contract import ContractError


class EngineCallFailed(RuntimeError):
    """An engine answered a call of ours with an error; the engine's log says why."""


@dataclass
class InferenceClient(RemoteInferenceClient):
    """SkyRL's client with the calls of :class:`~isoexec.runtimes.skyrl.extension.EngineExtension`."""

    routed: bool = True
    """Whether a router stands before the engines; one engine needs none."""

    def connect(self, proxy_url: str, server_urls: list[str], routed: bool) -> None:
        """Name the endpoints, once the engines are up."""
        self.proxy_url, self.server_urls, self.routed = proxy_url, list(server_urls), routed

    async def call(self, method: str, **arguments) -> list:
        """Run ``method`` in every worker process of every engine.

        Returns:
            What each process answered, engine by engine.

        Raises:
            ContractError: an engine refused.
            EngineCallFailed: an engine did not do it.
        """
        answers = []
        for url in self.server_urls:
            try:
                _, answer = await self._call_server(url, "/collective_rpc", {"method": method, "kwargs": arguments})
            except Exception as error:
                raise EngineCallFailed(f"engine {url}: {method}: {error}") from error
            for result in (answer["body"] or {}).get("results", []):
                if result and "refused" in result:
                    raise ContractError(f"engine {url}: {result['refused']}")
                answers.append(result)
        return answers

    async def _post(self, url: str, *args, **kwargs):
        """As upstream; of an engine that is gone a router says so in other words than JSON.

        Raises:
            EngineCallFailed: no JSON came back, time and again.
        """
        try:
            return await super()._post(url, *args, **kwargs)
        except ValueError as error:
            raise EngineCallFailed(f"{url}: expected JSON, found another answer ({error}): an engine behind it is gone") from error

    async def detokenize(self, token_ids: list[list[int]]) -> list[str]:
        """Text of responses for their environments, without the tokens that end them; what is trained on are the tokens."""
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    async def finish_session(self, session_id: str) -> None:
        if self.routed:
            await super().finish_session(session_id)

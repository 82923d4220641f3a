"""Vendors of chat endpoints, by the `kind` of an endpoint's section: all that differs between their APIs.

A vendor with OpenAI's protocol is one more entry of `VENDORS`: its address, whether it needs a key, its price list.
Code is named by dotted references, which are resolved when they are used: the SDKs take a second to import, and this
package may not import the packages that use them. A plug-in's module imports this file, so nothing may read the entries
of `VENDORS` while modules are imported; its names alone are known then. Words of errors are not here but in
`data.endpoints.completions`: a gateway passes on those of other vendors, so they are read from whatever server sends
them.
"""

from collections.abc import Collection
from dataclasses import dataclass

from nautile.configs.plugins import Registry

# Names of the headers that state a limit, what remains of it, and the time until it is reset.
LimitHeaders = tuple[str, str, str]


@dataclass(frozen=True)
class BatchInterface:
    """Words of a vendor's batch API."""

    ended: frozenset[str]  # states in which a job is over, in small letters
    failed: str = "failed"  # the state of a job that was refused as a whole
    lost_rows: frozenset[str] = frozenset()  # codes of the errors of rows that the job did not reach before it ended
    full: str = "limit"  # in the message of a job that was refused because too much is queued
    price_factor: float = 0.5  # of the live price


@dataclass(frozen=True)
class Vendor:
    """One vendor's API, or a program of this machine that serves it. The defaults are those of OpenAI's protocol."""

    client: str = (
        "nautile.data.endpoints.openai_client:OpenAIClient"  # class with the protocol `data.endpoints.clients.Client`
    )
    embeddings: str = "nautile.data.endpoints.openai_client:OpenAIEmbeddings"  # the class for embeddings; empty: none
    program: str = ""  # a `ServerProgram` that the endpoint pool starts on this machine; empty: the server is remote
    url: str = ""  # the base URL of endpoints that set none; empty: they must set it
    needs_key: bool = False
    price_list: str = ""  # the vendor's name in the package genai-prices; empty: it is looked up by the base URL
    chat_path: str = "/chat/completions"  # behind the /v1 of the base URL
    seed_field: str = "seed"
    takes_grammar: bool = True  # whether a request may have the field `grammar`
    names_token_limit: bool = True  # whether the field of the token limit may have another name
    batch: BatchInterface | None = None  # None: no batch API
    # Limits of requests and of tokens. The limiter reads those of all vendors from any answer, because of gateways.
    request_limits: tuple[LimitHeaders, ...] = ()
    token_limits: tuple[LimitHeaders, ...] = ()
    judge_only: bool = False  # marks answers and writes none, so it stands in for a judge and for nothing else
    short_prompts: bool = False  # a small model, which follows the short form of a teacher's prompt better

    @property
    def needs_url(self) -> bool:
        """Whether an endpoint must set its `url`."""
        return not self.url and not self.program


VENDORS: Registry[Vendor] = Registry(
    "vendors",
    Vendor,
    {
        "openai": Vendor(
            batch=BatchInterface(
                ended=frozenset({"completed", "failed", "expired", "cancelled", "canceled"}),
                lost_rows=frozenset({"batch_expired", "batch_cancelled"}),
            ),
            request_limits=(
                ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
            ),
            token_limits=(("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),),
        ),
        "mistral": Vendor(
            client="nautile.data.endpoints.mistral_client:MistralClient",
            embeddings="",
            url="https://api.mistral.ai",
            needs_key=True,
            price_list="mistral",
            seed_field="random_seed",
            takes_grammar=False,
            names_token_limit=False,
            batch=BatchInterface(
                ended=frozenset({"success", "failed", "timeout_exceeded", "cancelled"}),
            ),
            request_limits=(
                ("x-ratelimit-limit-req-minute", "x-ratelimit-remaining-req-minute", "x-ratelimit-reset-req-minute"),
            ),
            token_limits=(
                (
                    "x-ratelimit-limit-tokens-minute",
                    "x-ratelimit-remaining-tokens-minute",
                    "x-ratelimit-reset-tokens-minute",
                ),
                ("ratelimitbysize-limit", "ratelimitbysize-remaining", "ratelimitbysize-reset"),
            ),
        ),
        # A small model on this machine.
        "embedded": Vendor(program="nautile.data.endpoints.embedded:PROGRAM", embeddings="", short_prompts=True),
        # A program that marks arithmetic.
        "checker": Vendor(program="nautile.data.endpoints.own_server:CHECKER", embeddings="", judge_only=True),
    },
)


def is_judge(kind: object) -> bool:
    """Whether endpoints of this kind only mark answers; False for a vendor that is not installed here."""
    return isinstance(kind, str) and kind in VENDORS and VENDORS[kind].judge_only


def known_kind(kind: str, kinds: Collection[str] = VENDORS) -> str:
    """The kind of an endpoint's section, by default the name of a vendor. Raises `ValueError` for any other."""
    if kind not in kinds:
        raise ValueError(f"no kind {kind!r}; the kinds are {', '.join(kinds)}")
    return kind

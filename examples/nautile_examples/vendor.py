"""A vendor of chat endpoints: what differs from OpenAI's protocol. `kind = "acme"` in `[endpoints.NAME]`."""

from nautile.configs.vendors import Vendor

acme = Vendor(
    url="https://api.acme.example/v1",  # of endpoints that set none
    needs_key=True,  # `key_variable` names the environment variable with it
    seed_field="random_seed",
    takes_grammar=False,
    # Names of the headers with the limit of requests, what remains of it, and the time until it is reset.
    request_limits=(("acme-limit", "acme-remaining", "acme-reset"),),
    # A protocol of its own: `client` is the reference of a class with `nautile.data.endpoints.clients.Client`.
)

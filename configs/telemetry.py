"""Where metrics go besides the store, if anywhere. In no key: it says who looks on, not what is made."""

from urllib.parse import urlsplit

from pydantic import PositiveFloat, model_validator

from configs.section import Section


class TelemetryConfig(Section):
    """Nothing is sent unless one of these is set. Keys of a collector stand in OTEL_EXPORTER_OTLP_HEADERS, never here.

    `tensorboard`: a folder for event files, `<folder>/<run>/<label>`. `otlp`: the address of an OpenTelemetry
    collector (http://host:4318); metrics go to its /v1/metrics.
    """

    tensorboard: str = ""
    otlp: str = ""
    timeout_s: PositiveFloat = 5.0  # for the collector to take a batch; what it does not take is counted and dropped

    @model_validator(mode="after")
    def _address_usable(self) -> "TelemetryConfig":
        parts = urlsplit(self.otlp)
        if self.otlp and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"telemetry.otlp {self.otlp!r}: an address like http://127.0.0.1:4318 is meant")
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "telemetry.otlp: no key belongs in an address; put it into the environment as "
                "OTEL_EXPORTER_OTLP_HEADERS"
            )
        return self

    @property
    def wanted(self) -> bool:
        return bool(self.tensorboard or self.otlp)

"""Forward the metrics of a running stage to the services configured in `[telemetry]`; by default to none."""

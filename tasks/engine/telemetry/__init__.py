"""Metrics of a stage at work, sent on to where `[telemetry]` of the configuration names; nowhere by default."""

"""Configuration: frozen pydantic models (`configs.schema`), TOML loading with `extends` (`configs.load`)."""

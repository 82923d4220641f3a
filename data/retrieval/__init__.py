"""Retrieval of exemplars for a teacher's prompt: sentence embeddings and nearest-neighbour search."""

import os

# When imported, onnxruntime would write a machine identifier under ~/.cache/Microsoft and collect telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

"""Exemplars for a teacher's prompt: texts as vectors, and the nearest of them."""

import os

# As it is imported, onnxruntime writes an identifier of this machine under ~/.cache/Microsoft and collects telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

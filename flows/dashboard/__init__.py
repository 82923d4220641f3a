"""The dashboard: Streamlit pages over the store, read-only. `nautile dashboard` serves it."""

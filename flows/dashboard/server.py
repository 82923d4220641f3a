"""The dashboard as Streamlit serves it: the script of the pages behind a check of origins.

Its pages can answer a question, and cancel or retry a run, so a browser may use it for its own page alone. Streamlit
by itself takes WebSockets from any page of a loopback address, and for any name that points to this machine.
"""

from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware

from flows.operate.own_page import OwnPageOnly

app = st.App(
    Path(__file__).with_name("app.py"),
    middleware=[Middleware(OwnPageOnly, host=st.get_option("server.address"), port=st.get_option("server.port"))],
)

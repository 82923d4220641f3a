"""Pages about runs: how the chosen run stands, and all of them."""

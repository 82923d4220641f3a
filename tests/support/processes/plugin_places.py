"""Print, as JSON, what the places that show stages say of a plug-in's: `plugin_places.py CONFIG RUN`."""

import json
import sys

from jsonschema import Draft202012Validator
from streamlit.testing.v1 import AppTest

from nautile.common.errors import ConfigError
from nautile.configs.load import load, load_form
from nautile.flows.dag import build_dag
from nautile.flows.dashboard import shared
from nautile.flows.dashboard.graph import drawing
from nautile.flows.operate.approval import asks_before, expected_cost
from nautile.flows.operate.deployments import deploy_settings, deployments
from nautile.flows.pipeline import pipeline
from nautile.store.mirror import open_store


def curves_page(run):
    from nautile.flows.dashboard import curves, shared

    curves.training(shared.chosen_run(run))


def samples_page(run):
    from nautile.flows.dashboard import samples, shared

    samples.training_samples(shared.chosen_run(run))


def words(page, run):
    shown = AppTest.from_function(page, args=(run,), default_timeout=60).run()
    return [str(getattr(element, "proto", "")) for element in shown.main]


def refusal(*settings, read=load):
    try:
        read(sys.argv[1], settings)
    except ConfigError as error:
        return str(error)
    return ""


config, run, store = load(sys.argv[1]), sys.argv[2], open_store()
step = next(step for step in build_dag(config) if step.label == "dedupe")
other = next(s for s in build_dag(load(sys.argv[1], ["dedupe.threshold=0.5"])) if s.label == "dedupe")
form = Draft202012Validator(pipeline.parameters.model_dump(mode="json"))
answers = {
    "keys differ": step.key != other.key,
    "deployments": {entry.name: entry.parameters for entry in deployments(config, sys.argv[1])},
    "pool": deploy_settings(config)["dedupe"].pool,
    "form": form.is_valid({"only": "dedupe"}),
    "form sets its section": form.is_valid({"overrides": ["dedupe.threshold=0.5"]}),
    "asks": asks_before(store, config, step, force=True),
    "approval": expected_cost(store, config, step),
    "graph": drawing(shared.chosen_run(run).state.steps, run),
    "curves": words(curves_page, run),
    "samples": words(samples_page, run),
    "refused value": refusal("dedupe.threshold=7"),
    "refused in a form": refusal("dedupe.threshold=0.5", read=load_form),
    "refused key": refusal("dedupes.threshold=0.5"),
}
sys.stdout.write(json.dumps(answers))

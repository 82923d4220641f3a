"""Webhook messages to the operator: a run failed, finished, waits, nears its budget, or a metric is beyond a limit.

`[operation] notify` names the environment variable with the URL of an incoming webhook. Slack, Mattermost and Teams
show the `text` of a message; its other fields are for programs. A thread sends each event once, with a command that
helps: a run does not wait for messages, except at its end for at most FLUSH_S. The URL is a secret and never logged.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from queue import SimpleQueue
from typing import Any, Literal

import httpx

from nautile.common.commands import shell_command
from nautile.common.metrics import metric
from nautile.common.retry import Backoff, retry
from nautile.common.text import counted, visible
from nautile.configs.operation import Alert
from nautile.configs.stages import TRAINED
from nautile.evals.benchmarks.registry import title_of
from nautile.evals.scoring.scores import marked_title
from nautile.store.artifacts import Store
from nautile.tasks.engine.errors import advice, reason, run_page
from nautile.tasks.engine.progress import StageUpdate, subscribe

logger = logging.getLogger(__name__)

Event = Literal["finished", "failed", "waiting", "budget", "outage", "regression", "alert"]

TIMEOUT_S = 10.0
FLUSH_S = 20.0  # one message that needs all attempts may take 35 s: it is given up, because the run has ended
BACKOFF = Backoff(attempts=3, first_s=1.0, factor=4.0, jitter=0.0)  # pauses of 1 s and 4 s
MOST_CHARACTERS = 2000  # a message, not a log
NEAR_BUDGET = 0.8  # `budget_spent_share` from which on a message is sent
OWN_BUDGETS = ("distill", "evaluate")  # stages with a budget of their own; endpoints may have one for any stage
_RETRY_STATUSES = (408, 425, 429)  # and all 5xx
_EVERYBODY = re.compile(r"@(?=(channel|here|all|everyone)\b)", re.IGNORECASE)


class Notifier:
    """Sends the messages of one flow run in a thread. With an empty `variable` it sends nothing."""

    def __init__(self, variable: str, config: str, run_id: str, alerts: Sequence[Alert] = ()) -> None:
        self._variable, self._config, self._run_id, self._alerts = variable, config, run_id, alerts
        self._alerted: list[Alert] = []  # the rules that a message was sent for
        self._sent: set[tuple[Event, str, str]] = set()
        self._messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        # A daemon thread, so that a receiver that never answers does not keep the process alive.
        self._thread = threading.Thread(target=self._post_all, name="notifications", daemon=True)
        if variable:
            self._thread.start()

    def send(self, event: Event, text: str, label: str = "", topic: str = "") -> None:
        """Queue a message, unless one with this event, step and topic has been queued before."""
        if self._variable and (event, label, topic) not in self._sent:
            self._sent.add((event, label, topic))
            more = {"config": self._config, "run": self._run_id, "label": label}
            self._messages.put(message(event, text, **more))

    def failed(self, label: str, error: BaseException, command: str) -> None:
        """Send why a step, or the run (empty label), failed after all retries, and the command that resumes it."""
        subject = f"stage {label} of {self._config}" if label else f"the run of {self._config}"
        resume = f"\nContinue with: `{command}`" if command else ""
        self.send("failed", f"{subject} failed: {reason(error)}\n{advice(error)}{resume}", label)

    def on_update(self, update: StageUpdate) -> None:
        """Send a message for an update of a step of this run: a question, an outage, or a nearly used-up budget."""
        if update.run_id != self._run_id:
            return
        where = f"stage {update.label} of {self._config}"
        self._check_alerts(update, where)
        if update.question:
            # A step may have two questions: before it begins, and at its budget.
            self.send("waiting", update.question, update.label, topic=update.question)
        elif update.outage_until is not None:
            # One message per step, however many outages follow: the first says how to look.
            until = datetime.fromtimestamp(update.outage_until).astimezone()
            text = f"{where} waits for an outage to end, until {until:%Y-%m-%d %H:%M %Z}: {update.reason}"
            command = shell_command("nautile", "logs", self._run_id[:8])
            self.send("outage", f"{text}\n`{command}` shows the attempts.", update.label)
        elif (share := update.metrics.get("budget_spent_share", 0.0)) >= NEAR_BUDGET:
            text = f"{where} has used {100 * share:.0f} % of a budget. It ends at the limit with what it has by then."
            # The metric says how much is spent, not whose limit it is: the stage's own or that of an endpoint.
            fields = ["endpoints.NAME.budget_dollars"]
            if update.stage in OWN_BUDGETS:
                fields.insert(0, f"{update.stage}.budget_dollars")
            budgets = " or ".join(f"`{field}`" for field in fields)
            more = f"For more, stop the run, raise {budgets} and run it again; replies are kept."
            self.send("budget", f"{text}\n{more}", update.label)

    def _check_alerts(self, update: StageUpdate, where: str) -> None:
        """Send a message for each of `[operation] alerts` that the newest values are beyond, once for each rule."""
        for rule in [rule for rule in self._alerts if rule not in self._alerted]:
            value = update.metrics.get(rule.metric)
            if value is None or not (crossed := rule.crossed(update.label, value)):
                continue
            title = metric(rule.metric).title
            self._alerted.append(rule)
            text = f"{where}: {title} (`{rule.metric}`) is {value:.4g}, {crossed}."
            self.send("alert", text, update.label, topic=rule.model_dump_json())

    def close(self) -> None:
        """Wait at most FLUSH_S for messages that are not sent yet."""
        self._messages.put(None)
        if self._variable:
            self._thread.join(FLUSH_S)
            if self._thread.is_alive():
                logger.warning("operation.notify: messages were not delivered within %g s", FLUSH_S)

    def _post_all(self) -> None:
        while (body := self._messages.get()) is not None:
            post_webhook(self._variable, body)


@contextmanager
def notifying(
    variable: str, config: str, run_id: str, resume: Callable[[str], str], alerts: Sequence[Alert] = ()
) -> Iterator[Notifier]:
    """Send the events of a flow run during the block, and its failure if the block raises.

    `alerts`: rules on the newest values of metrics, as far as a step shows them while it works.
    `resume`: label -> the command that resumes the run from that step, or empty. `StageFailed` sends one per step.
    """
    notifier = Notifier(variable, config, run_id, alerts)
    unsubscribe = subscribe(notifier.on_update)
    try:
        yield notifier
    except Exception as error:
        for label, cause in getattr(error, "failures", {"": error}).items():
            notifier.failed(label, cause, resume(label))
        raise
    finally:
        unsubscribe()
        notifier.close()


def message(event: Event, text: str, **fields: Any) -> dict[str, Any]:
    """The body of a message. Chat markup and mentions of everybody in the text are escaped.

    A message about a `run` has a link to its page, if the dashboard's address is known.
    """
    page = run_page(fields["run"]) if fields.get("run") else ""
    text = visible(text, MOST_CHARACTERS) + (f"\nThe run in the dashboard: {page}" if page else "")
    # `&` before the brackets, or it would escape their escapes.
    escaped = _EVERYBODY.sub("@ ", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    more = {"page": page} if page else {}
    return {"text": f"Nautile: {escaped}", "event": f"nautile.{event}", **fields, **more}


def finished_text(store: Store, config: str, outputs: Mapping[str, Mapping[str, str]]) -> str:
    """The text about a run that has finished: its number of steps, and the scores of the last model that it trained.

    `outputs`: label -> kind -> artifact id.
    """
    lines = [f"{config} finished, {counted(len(outputs), 'step')}. `nautile status` lists what they made."]
    for stage in reversed(TRAINED):
        if evaluation := outputs.get(f"evaluate:{stage}", {}).get("evaluation"):
            facts = store.get(evaluation).manifest["facts"]
            unscreened = facts.get("not_screened", {})
            shown = [
                f"{marked_title({'title': title_of(name), 'not_screened': unscreened.get(name)})} {100 * score:.1f} %"
                for name, score in facts.get("accuracy", {}).items()
                if score is not None
            ]
            lines += [f"After {stage}: {', '.join(shown)}."] if shown else []
            break
    return "\n".join(lines)


def post_webhook(variable: str, body: dict[str, Any], sleep: Callable[[float], object] = time.sleep) -> str | None:
    """POST `body` as JSON to the URL in the environment variable `variable`; None if accepted (2xx), else the error.

    Never raises, because a failed message must not fail the run. Redirects are not followed.
    """
    url = os.environ.get(variable, "")
    if not url:
        problem = f"operation.notify: the environment variable {variable} is not set where the flow runs"
        logger.warning(problem)
        return problem
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every URL
    try:
        retry(
            lambda: httpx.post(url, json=body, timeout=TIMEOUT_S, follow_redirects=False).raise_for_status(),
            BACKOFF,
            should_retry=_should_retry,
            before_pause=lambda error, _, pause_s: logger.warning(
                "the webhook in %s failed (%s); retrying in %g s", variable, _describe(error), pause_s
            ),
            sleep=sleep,
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        problem = f"the webhook in {variable} failed: {_describe(error)}"
        logger.error(problem)
        return problem
    return None


def _should_retry(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _RETRY_STATUSES or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


def _describe(error: Exception) -> str:
    """The error without its own text, which may contain the URL."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    if isinstance(error, httpx.TransportError):
        return visible(type(error).__name__, 80)
    return f"{type(error).__name__}: is it a whole URL (https://…)?"

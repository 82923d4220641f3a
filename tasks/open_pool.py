"""The pool of a stage's endpoints: replies are kept in the store, for every run and stage that asks the same."""

from configs.endpoint import EndpointConfig
from data.endpoints.pool import EndpointPool
from data.endpoints.reply_cache import ReplySource
from tasks.engine.job import Job


def open_pool(job: Job, budget_dollars: float = 0.0, budget_tokens: int = 0) -> EndpointPool:
    """The endpoints of the job's section, with a budget (0: none). To be used as a context manager."""
    endpoints = {name: EndpointConfig.model_validate(fields) for name, fields in job.section["endpoints"].items()}
    # Earlier versions kept the replies of an unfinished execution in its scratch folder.
    source = ReplySource(
        job.replies or job.scratch / "replies", job.execution, job.ask_again, job.scratch / "replies.jsonl"
    )
    return EndpointPool(endpoints, source, job.emit, budget_dollars, budget_tokens)

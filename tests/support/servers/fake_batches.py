"""The batch interfaces of OpenAI and Mistral, as routes of `FakeOpenAI`: files, jobs that take a few polls, results."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from typing import Any
from urllib.parse import parse_qs

from tests.support.servers.http_server import Request

RowFault = Callable[[str, int], str | None]  # (text of the prompt, how often it was submitted) -> "500", "expired", …
Complete = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class FakeBatches:
    """Jobs end after `polls` polls with status `end`: "completed", "expired" or "cancelled" (half of the rows done),
    "failed" (none is). `loses`: steps ("upload", "create", "status", "download") that are carried out but whose next
    answer is lost, each once. `reshape(step, answer)` is the answer that is sent. `submitted`: how often each prompt
    was put into a job; `most_open`: jobs in progress together."""

    complete: Complete
    fault_message: str = "a requested fault"
    polls: int = 2
    end: str = "completed"
    row_fault: RowFault = lambda text, times: None
    loses: list[str] = field(default_factory=list)
    reshape: Callable[[str, Any], Any] = lambda step, answer: answer

    def __post_init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submitted: Counter[str] = Counter()
        self.most_open = 0
        self.steps: Counter[str] = Counter()

    def route(self, request: Request) -> tuple[str, Any] | None:
        """The step of a batch job and its answer (JSON data, or the bytes of a file); None for any other request."""
        method, path, content = request.method, request.path, request.body
        query = {name: values[0] for name, values in parse_qs(request.query).items()}
        if method == "POST" and path == "/v1/files":
            return "upload", self._upload(request.headers, content)
        if match := re.fullmatch(r"/v1/files/([^/]+)/content", path):
            return "download", self.files[match[1]]
        for prefix, vendor in (("/v1/batches", "openai"), ("/v1/batch/jobs", "mistral")):
            if method == "POST" and path == prefix:
                return "create", self._create(vendor, json.loads(content))
            if method == "GET" and path == prefix:
                return "list", self._list(vendor, query)
            if method == "GET" and path.startswith(f"{prefix}/"):
                return "status", self._status(self.jobs[path.rsplit("/", 1)[1]])
        return None

    def is_lost(self, step: str) -> bool:
        """Whether the answer to this step gets lost."""
        self.steps[step] += 1
        if step in self.loses:
            self.loses.remove(step)
            return True
        return False

    def _upload(self, headers: Message, content: bytes) -> dict[str, Any]:
        boundary = re.search(r"boundary=([^;]+)", headers["content-type"])[1].strip('"').encode()
        (part,) = (part for part in content.split(b"--" + boundary) if b'name="file"' in part)
        name = f"file-{len(self.files)}"
        self.files[name] = part.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n")
        return {
            "id": name,
            "object": "file",
            "bytes": len(self.files[name]),
            "created_at": int(time.time()),
            "filename": "input.jsonl",
            "purpose": "batch",
            "status": "processed",
            "sample_type": "batch_request",
            "source": "upload",
        }

    def _create(self, vendor: str, body: dict[str, Any]) -> dict[str, Any]:
        source = body["input_file_id"] if vendor == "openai" else body["input_files"][0]
        rows = [json.loads(line) for line in self.files[source].splitlines()]
        for row in rows:
            self.submitted[text_of(row["body"]["messages"][-1])] += 1
        job = {"id": f"{vendor}-{len(self.jobs)}", "vendor": vendor, "request": body, "rows": rows}
        job |= {"source": source, "polled": 0, "created_at": int(time.time()), "output": None, "error": None}
        self.jobs[job["id"]] = job
        self.most_open = max(self.most_open, sum(job["polled"] < self.polls for job in self.jobs.values()))
        return self._answer(job)

    def _status(self, job: dict[str, Any]) -> dict[str, Any]:
        job["polled"] += 1
        if job["polled"] == self.polls:
            self._finish(job)
        return self._answer(job)

    def _list(self, vendor: str, query: dict[str, str]) -> dict[str, Any]:
        jobs = [self._answer(job) for job in reversed(self.jobs.values()) if job["vendor"] == vendor]
        if vendor == "mistral":
            page, size = int(query.get("page", 0)), int(query.get("page_size", 100))
            return {"object": "list", "data": jobs[page * size : (page + 1) * size], "total": len(jobs)}
        size, ids = int(query.get("limit", 20)), [job["id"] for job in jobs]
        start = ids.index(query["after"]) + 1 if "after" in query else 0
        return {"object": "list", "data": jobs[start : start + size], "has_more": start + size < len(jobs)}

    def _finish(self, job: dict[str, Any]) -> None:
        if self.end == "failed":
            return
        rows = job["rows"] if self.end == "completed" else job["rows"][: len(job["rows"]) // 2]
        good, bad = [], []
        for row in rows:
            text = text_of(row["body"]["messages"][-1])
            fault = self.row_fault(text, self.submitted[text])
            if fault == "missing":
                continue
            line = {"id": f"r-{row['custom_id'][:6]}", "custom_id": row["custom_id"], "response": None, "error": None}
            if fault == "expired":
                bad.append({**line, "error": {"code": "batch_expired", "message": "not in time"}})
            elif fault is not None:
                body = {"error": {"message": f"{self.fault_message}: {fault}"}}
                bad.append({**line, "response": {"status_code": int(fault), "request_id": "x", "body": body}})
            else:
                body = self.complete({"model": job["request"].get("model"), **row["body"]})
                good.append({**line, "response": {"status_code": 200, "request_id": "x", "body": body}})
        for name, lines in (("output", good), ("error", bad)):
            if lines:
                job[name] = f"file-{len(self.files)}"
                self.files[job[name]] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def _answer(self, job: dict[str, Any]) -> dict[str, Any]:
        ended = job["polled"] >= self.polls
        count = len(job["rows"])
        common = {
            "id": job["id"],
            "object": "batch",
            "created_at": job["created_at"],
            "metadata": job["request"].get("metadata"),
            "endpoint": job["request"]["endpoint"],
        }
        failed = [{"code": "invalid", "message": "no such file"}] if ended and self.end == "failed" else []
        if job["vendor"] == "openai":
            return {
                **common,
                "completion_window": "24h",
                "input_file_id": job["source"],
                "status": self.end if ended else "in_progress",
                "output_file_id": job["output"],
                "error_file_id": job["error"],
                "errors": {"object": "list", "data": failed},
            }
        ends = {"completed": "SUCCESS", "expired": "TIMEOUT_EXCEEDED", "cancelled": "CANCELLED", "failed": "FAILED"}
        return {
            **common,
            "input_files": [job["source"]],
            "errors": [{"message": error["message"], "count": 1} for error in failed],
            "status": ends[self.end] if ended else "RUNNING",
            "model": job["request"].get("model"),
            "total_requests": count,
            "completed_requests": count if ended else 0,
            "succeeded_requests": count if ended else 0,
            "failed_requests": 0,
            "output_file": job["output"],
            "error_file": job["error"],
        }


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, whose content is text or a list of parts."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())

"""The batch interfaces of OpenAI and Mistral, as routes of `FakeOpenAI`: files, jobs that take a few polls, results."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

RowFault = Callable[[str, int], str | None]  # (text of the prompt, how often it was submitted) -> "500", "expired", …
Complete = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class FakeBatches:
    """Jobs end after `polls` looks at them, as `end` says: "completed", "expired", "cancelled" (a half is done) or
    "failed" (nothing is). `loses`: steps ("upload", "create", "look", "read") whose next answer never leaves, each
    once, though what was asked has been done. `submitted`: how often each prompt was put into a job."""

    complete: Complete
    said: str = "a fault to order"
    polls: int = 2
    end: str = "completed"
    row_fault: RowFault = lambda text, times: None
    loses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submitted: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()

    def route(self, method: str, path: str, headers: dict[str, str], content: bytes) -> tuple[str, Any] | None:
        """The step that a request is and its answer (JSON data, or the bytes of a file); None if it is none."""
        parts = urlsplit(path)
        where, query = parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}
        if method == "POST" and where == "/v1/files":
            return "upload", self._upload(headers, content)
        if found := re.fullmatch(r"/v1/files/([^/]+)/content", where):
            return "read", self.files[found[1]]
        for prefix, vendor in (("/v1/batches", "openai"), ("/v1/batch/jobs", "mistral")):
            if method == "POST" and where == prefix:
                return "create", self._create(vendor, json.loads(content))
            if method == "GET" and where == prefix:
                return "list", self._list(vendor, query)
            if method == "GET" and where.startswith(f"{prefix}/"):
                return "look", self._look(self.jobs[where.rsplit("/", 1)[1]])
        return None

    def is_lost(self, step: str) -> bool:
        """Whether the answer to this step gets lost."""
        self.steps[step] += 1
        if step in self.loses:
            self.loses.remove(step)
            return True
        return False

    def _upload(self, headers: dict[str, str], content: bytes) -> dict[str, Any]:
        boundary = re.search(r"boundary=([^;]+)", headers["content-type"])[1].strip('"').encode()
        (part,) = (one for one in content.split(b"--" + boundary) if b'name="file"' in one)
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

    def _create(self, vendor: str, asked: dict[str, Any]) -> dict[str, Any]:
        source = asked["input_file_id"] if vendor == "openai" else asked["input_files"][0]
        rows = [json.loads(line) for line in self.files[source].splitlines()]
        for row in rows:
            self.submitted[_text(row["body"])] += 1
        job = {"id": f"{vendor}-{len(self.jobs)}", "vendor": vendor, "asked": asked, "rows": rows}
        job |= {"source": source, "looks": 0, "created_at": int(time.time()), "output": None, "error": None}
        self.jobs[job["id"]] = job
        return self._shown(job)

    def _look(self, job: dict[str, Any]) -> dict[str, Any]:
        job["looks"] += 1
        if job["looks"] == self.polls:
            self._finish(job)
        return self._shown(job)

    def _list(self, vendor: str, query: dict[str, str]) -> dict[str, Any]:
        jobs = [self._shown(job) for job in reversed(self.jobs.values()) if job["vendor"] == vendor]
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
            fault = self.row_fault(_text(row["body"]), self.submitted[_text(row["body"])])
            if fault == "missing":
                continue
            line = {"id": f"r-{row['custom_id'][:6]}", "custom_id": row["custom_id"], "response": None, "error": None}
            if fault == "expired":
                bad.append({**line, "error": {"code": "batch_expired", "message": "not in time"}})
            elif fault is not None:
                body = {"error": {"message": f"{self.said}: {fault}"}}
                bad.append({**line, "response": {"status_code": int(fault), "request_id": "x", "body": body}})
            else:
                body = self.complete({"model": job["asked"].get("model"), **row["body"]})
                good.append({**line, "response": {"status_code": 200, "request_id": "x", "body": body}})
        for name, lines in (("output", good), ("error", bad)):
            if lines:
                job[name] = f"file-{len(self.files)}"
                self.files[job[name]] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def _shown(self, job: dict[str, Any]) -> dict[str, Any]:
        ended = job["looks"] >= self.polls
        count = len(job["rows"])
        common = {
            "id": job["id"],
            "object": "batch",
            "created_at": job["created_at"],
            "metadata": job["asked"].get("metadata"),
            "endpoint": job["asked"]["endpoint"],
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
            "errors": [{"message": one["message"], "count": 1} for one in failed],
            "status": ends[self.end] if ended else "RUNNING",
            "model": job["asked"].get("model"),
            "total_requests": count,
            "completed_requests": count if ended else 0,
            "succeeded_requests": count if ended else 0,
            "failed_requests": 0,
            "output_file": job["output"],
            "error_file": job["error"],
        }


def _text(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]

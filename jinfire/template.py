"""Chat templates of strangers, rendered in a process of their own.

A sandbox keeps a template away from Python's internals, but not from time and memory: only the
operating system bounds those. So `render` runs this file as a program under limits. It imports
none of the package, so that a render starts quickly.
"""

import datetime as dt
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

try:
    import resource
except ImportError:  # not on Windows: time, template and output are bounded there, memory is not
    resource = None

MAX_TEMPLATE_CHARS = 2**20
MAX_RENDERED_CHARS = 2**24
MAX_ERROR_CHARS = 1000
MAX_MEMORY_BYTES = 2**30
RENDER_TIMEOUT_S = 10.0

# The process's size in pages; Linux only. macOS does not enforce a limit on it.
STATM = Path("/proc/self/statm")


def render(template: str, variables: Mapping[str, Any], timeout_s: float = RENDER_TIMEOUT_S) -> str:
    """The text of a template whose variables are JSON values.

    Raises: ValueError where the template fails, refuses, or passes a limit.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ValueError(
            f"chat template: at most {MAX_TEMPLATE_CHARS} characters, got {len(template)}"
        )
    try:
        job = _dump({"template": template, "variables": variables})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat template: expected JSON values as variables: {error}") from error
    # The parent's clock ends a render; the limit on CPU time is for a child that outlives it.
    cpu_s = math.ceil(timeout_s) + 1
    # -P: neither the folder of this file nor the current one is searched for modules.
    command = [sys.executable, "-P", __file__, str(cpu_s)]
    try:
        done = subprocess.run(
            command, input=job, timeout=timeout_s, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"chat template: took more than {timeout_s:g} s") from error
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(
            f"chat template: rendering ended with status {done.returncode}: "
            f"{last[:MAX_ERROR_CHARS]}"
        )
    reply = _load(done.stdout)
    if "error" in reply:
        raise ValueError(f"chat template: {reply['error']}")
    return reply["text"]


def _dump(value: Any) -> bytes:
    """JSON; lone surrogates pass, as they may stand in a template or in what it makes."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _load(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


# --- in the child


def _limit(cpu_s: int) -> None:
    if resource is None:
        return
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: cpu_s}
    if STATM.exists():
        own_bytes = int(STATM.read_text().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = own_bytes + MAX_MEMORY_BYTES
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (bound, bound))


def _environment() -> jinja2.Environment:
    """The environment of transformers, without `lipsum`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: dt.datetime.now().strftime(form),
    }
    del environment.globals["lipsum"]
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers renders it; Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _text(template: str, variables: Mapping[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    try:
        for part in _environment().from_string(template).generate(**variables):
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise jinja2.TemplateError(
                    f"at most {MAX_RENDERED_CHARS} characters of output, got at least {size}"
                )
            parts.append(part)
    except MemoryError as error:
        raise ValueError(f"needed more than {MAX_MEMORY_BYTES >> 20} MiB of memory") from error
    except Exception as error:  # whatever a stranger's template can raise
        raise ValueError(str(error) or type(error).__name__) from error
    return "".join(parts)


def _main() -> None:
    _limit(cpu_s=int(sys.argv[1]))
    job = _load(sys.stdin.buffer.read())
    try:
        reply = {"text": _text(job["template"], job["variables"])}
    except ValueError as error:
        reply = {"error": str(error)[:MAX_ERROR_CHARS]}
    sys.stdout.buffer.write(_dump(reply))


if __name__ == "__main__":
    _main()

"""A process that has imported the package and runs command lines in forks of itself, so that a start takes no seconds.

Reads a job a line: {"start": [arguments], "log": file} answers with the process's number, {"poll": number} with its
exit code or null, {"wait": number} with its exit code (-9: killed).
"""

from __future__ import annotations

import json
import os
import sys

import torch

import qvattn.cli.compare
import qvattn.cli.train
import qvattn.lab.compare
import qvattn.train.run


def start(arguments: list[str], log: str) -> int:
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        os.read(reader, 1)  # the child has a session of its own, so that killing the session finds it
        os.close(reader)
        return child
    os.setsid()
    os.close(reader)
    os.close(writer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    try:
        code = qvattn.cli.main(arguments)
    except BaseException as error:
        print(f"traceback: {error!r}", file=sys.stderr)
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(child: int, options: int) -> int | None:
    done, status = os.waitpid(child, options)
    return None if done == 0 else os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "start" in job:
            answer = start(job["start"], job["log"])
        else:
            answer = ended(job["wait"], 0) if "wait" in job else ended(job["poll"], os.WNOHANG)
        print(json.dumps(answer), flush=True)

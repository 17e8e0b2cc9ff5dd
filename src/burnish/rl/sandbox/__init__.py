"""Runs Python that a model wrote: a fork server, limits on what a snippet can use, and sessions that fork.

Three kinds of processes take part. The trainer uses a `Sandbox` (`client.py`). It starts a server (`server.py`), a
clean interpreter that never runs the model's code. The server forks the root process, which imports the preloaded
modules, locks itself in with Landlock and seccomp, and waits. Every snippet runs in a process forked from the root, or
from the process that ran the snippet before it (`snippet.py`).
"""

"""One package or module per task, with its computation, its page, and its public function.

The command and the studio tab of a task call that function; `dear.NAME` is the same function.
"""

"""What keeps a plan served while its machines come and go: one controller, and an agent on each machine.

``decide`` (pure) says what is to be done, ``controller`` does it: machines from a ``provider``, processes through the
``agent`` of each machine, targets through the router. What it knows is on disk (``state``).
"""

"""Runs real DeepSpeed on the CPU: trains tiny models, resumes them, reads what engines hold.

Theory. DeepSpeed is the judge of reshard's output, so nothing here uses reshard. A :class:`Recipe`
says what is trained and how it is spread; a job is a function that N forked gloo workers run
together; the states it returns are read out of the *live* engines (flat partitions and their real
offsets), never out of files.

============  =====================================================================
``recipe``    what to train: model, topology, configuration; to and from topology.json
``models``    our tiny models (the golden data and the example)
``engine``    recipe → engine; the fixed batches; training steps
``states``    what the engines hold → full logical tensors
``jobs``      train-and-save, resume, convert with DeepSpeed's own converter
``workers``   forks the workers of one job, with a watchdog
``server``    a process that imports everything once, then forks for each job asked for
``client``    starts that process and asks it
============  =====================================================================

Importing DeepSpeed and transformers takes many seconds and a job one or two; that is why there is
a server to fork from. ``recipe`` and ``client`` import neither.
"""

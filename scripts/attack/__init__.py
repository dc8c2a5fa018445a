"""The attack: thousands of damaged and mixed folders, and what reshard makes of each.

Theory. An honest folder is taken, one thing in it is changed by chance (a seed gives the same
folder again), and it is converted in a process of its own with limits. The result is held against
that of the honest folder, which is itself held against the truth of the live engines first; so no
code of reshard judges. One of these comes out:

``exact``
    the output is what the honest folder gives;
``refused``
    exit 2 with one ``error:`` line;
``undecidable``
    the output differs, and nothing in the folder could have told (:mod:`scripts.attack.excuses`
    lists these kinds, one by one, each with the reason);
``wrong``, ``traceback``, ``slow``, ``large``
    what may not happen: other values without a word, an answer that is no line, more than
    20 seconds of processor time, more than 1 GB.

``python -m scripts.attack --count 3000 --seed 1`` makes the table (``make attack``).
"""

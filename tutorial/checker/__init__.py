"""The checker of the chapters: what a page shows is taken from the repository, or it fails the tests.

``pytest tutorial`` checks every page, ``pytest tutorial/phase_03.md`` one; with ``--fix`` what is generated is written
anew. A page is Markdown with these fences (``chapter.py`` reads them):

==========================================  ========================================================================
```` ```python run ````                     runs, after the run fences before it, in one namespace a page (``runs.py``)
```` ```output ````                         directly after a run fence: what that fence printed (``matching.py``)
```` ```python source=PATH#NAME ````        equals that function, method, class or constant (``quotes.py``)
```` ```diff phases=02..03 ````             equals the difference of the two ``engine.py`` files
```` ```console ````                        ``$`` lines are run at the repository's root, the rest is what they print
```` ```text ````, toml, json, bash         shown as it stands, not checked
==========================================  ========================================================================

After ``run`` and ``console`` may stand ``demo``: needs the demo model, and is skipped where that is not fetched. After
``console``, ``norun``: not run; only that its ``infer`` and ``make`` commands, options, paths and modules exist is
checked. After ``run``, ``file=NAME.py``: the code is also written into that file, which later pages of the folder can
import (``files.py``). After ``source=``, ``nodoc``: without docstrings. After ``phases=``, ``target=Engine.NAME``: one
method instead of the file; or ``target=CLASS.NAME``, one of a part that replaces another, without its docstring. Any
other fence or attribute is an error. Quotes and diffs have one line instead of an exercise's lines (``folds.py``).

Numbers in the text that were measured are followed by their source, ``15.3<!-- {{report:FILE#KEY}} -->``
(``citations.py``). Links, paths, dotted names and commands in the text must exist (``references.py``).
"""

"""Pictures of maps, checkpoints and plans: SVG, PNG and HTML files that need nothing else.

Theory. A picture is made in three steps, each a pure function of the one before. *Bands* say which
rectangles of a sheet a piece covers (:mod:`.bands`); a *scene* says what stands where, in paints
named by their meaning (:mod:`.scene`); a *drawing* turns a scene into SVG or PNG, or sets it into a
page (:mod:`.svg`, :mod:`.png`, :mod:`.page`). Documents are built as element trees and serialized
by the standard library, which escapes: a name out of a checkpoint is text there and never markup.
"""

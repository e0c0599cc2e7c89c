"""``python -m dsv32_ops bench``: time, traffic and the fraction of the memory floor.

``cases`` says what is measured, ``measure`` measures one row of it, ``stream`` is the floor,
``results``, ``report``, ``plots`` and ``compare`` are what happens to the rows.
"""

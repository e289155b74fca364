"""Parts of decoder layers that can be blocks of their own: a layer adds what such a part makes to the rest."""

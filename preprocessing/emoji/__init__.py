"""The emoji picture set: vector drawings by five hands, composed so that every caption is true by construction."""

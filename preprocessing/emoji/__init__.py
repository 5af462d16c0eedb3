"""The emoji picture set: vector drawings composed so that every caption is true by construction."""

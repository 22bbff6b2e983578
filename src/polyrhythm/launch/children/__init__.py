"""Ranks as child processes of their launcher, which watches over them."""

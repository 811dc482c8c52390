"""Views of the web page as HTML files that hold their data and need no server."""

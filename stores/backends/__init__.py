"""Where the files of a store are: a local disk, an object store, a web server."""

"""A job's module whose import starts a thread, as some libraries do."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()

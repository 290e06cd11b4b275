//! Keeps payloads apart from the processes that made them: the Store trait and the host store.

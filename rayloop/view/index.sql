-- The tables of index.py. Words of an episode that is forgotten stay in `words`, with an id that is never used again.
CREATE TABLE files (step INTEGER PRIMARY KEY, changed INTEGER, size INTEGER, why TEXT);
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    step, grp, turns, flags, sample, task, source, reward, end_reason, status, length, replayed, advantage
);
CREATE INDEX by_group ON episodes (step, grp, sample);
CREATE INDEX by_source ON episodes (source);
CREATE INDEX by_end ON episodes (end_reason);
CREATE INDEX by_status ON episodes (status);
CREATE VIRTUAL TABLE words USING fts5(text, content='', tokenize='unicode61 remove_diacritics 2');

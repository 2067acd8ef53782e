package account

import "slices"

// journal collects what it takes to undo an operation that is under way.
type journal struct {
	undo []func()
}

func (j *journal) mark() int       { return len(j.undo) }
func (j *journal) record(f func()) { j.undo = append(j.undo, f) }
func (j *journal) forget()         { clear(j.undo); j.undo = j.undo[:0] }
func (j *journal) rollback(mark int) {
	for i := len(j.undo) - 1; i >= mark; i-- {
		j.undo[i]()
	}
	clear(j.undo[mark:])
	j.undo = j.undo[:mark]
}

// table holds the rows of one kind, sorted by key. Rows are replaced, never
// edited, so a row that was read stays what it was.
type table[K ~string, V any] struct {
	journal *journal
	rows    map[K]V
	keys    []K
}

func newTable[K ~string, V any](j *journal) *table[K, V] {
	return &table[K, V]{journal: j, rows: make(map[K]V)}
}

func (t *table[K, V]) get(key K) (V, bool) {
	v, ok := t.rows[key]
	return v, ok
}

func (t *table[K, V]) put(key K, row V) {
	old, existed := t.rows[key]
	t.journal.record(func() {
		if existed {
			t.rows[key] = old
		} else {
			t.remove(key)
		}
	})
	t.insert(key, row)
}

func (t *table[K, V]) del(key K) {
	old, existed := t.rows[key]
	if !existed {
		return
	}
	t.journal.record(func() { t.insert(key, old) })
	t.remove(key)
}

func (t *table[K, V]) insert(key K, row V) {
	if _, ok := t.rows[key]; !ok {
		i, _ := slices.BinarySearch(t.keys, key)
		t.keys = slices.Insert(t.keys, i, key)
	}
	t.rows[key] = row
}

func (t *table[K, V]) remove(key K) {
	delete(t.rows, key)
	if i, ok := slices.BinarySearch(t.keys, key); ok {
		t.keys = slices.Delete(t.keys, i, i+1)
	}
}

// all returns the rows in the order of their keys.
func (t *table[K, V]) all() []V {
	rows := make([]V, 0, len(t.keys))
	for _, key := range t.keys {
		rows = append(rows, t.rows[key])
	}
	return rows
}

package allocator

// Waiting returns how many urgent demands wait for a node.
func (a *Allocator) Waiting(name string) int {
	n := a.term.Load().node(name)
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.waiters)
}

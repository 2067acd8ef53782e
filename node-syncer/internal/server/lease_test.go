package server_test

import (
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func newLease(epoch string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Name: "eniplane-eni-allocator", Namespace: "kube-system", Annotations: map[string]string{"eniplane.dev/epoch": epoch},
	}}
}

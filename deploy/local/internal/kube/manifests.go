package kube

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// ErrKind says that ApplyFile met a kind that it does not know.
var ErrKind = errors.New("unknown kind")

// applied are the kinds that ApplyFile knows: who may do what.
var applied = map[string]schema.GroupVersionResource{
	"Namespace":          {Version: "v1", Resource: "namespaces"},
	"ServiceAccount":     {Version: "v1", Resource: "serviceaccounts"},
	"ClusterRole":        {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"},
	"ClusterRoleBinding": {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterrolebindings"},
	"Role":               {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"},
	"RoleBinding":        {Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "rolebindings"},
}

// ApplyFile applies the objects of a YAML file, server-side. It knows Namespaces,
// ServiceAccounts and the kinds of RBAC.
func (c *Client) ApplyFile(ctx context.Context, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		var object unstructured.Unstructured
		if err := yaml.Unmarshal(document, &object.Object); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if len(object.Object) == 0 {
			continue // nothing but comments
		}
		if err := c.apply(ctx, &object); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
}

func (c *Client) apply(ctx context.Context, object *unstructured.Unstructured) error {
	resource, ok := applied[object.GetKind()]
	if !ok {
		return fmt.Errorf("%w %q", ErrKind, object.GetKind())
	}
	options := metav1.ApplyOptions{FieldManager: "eniplane-local", Force: true}
	_, err := c.Dynamic.Resource(resource).Namespace(object.GetNamespace()).Apply(ctx, object.GetName(), object, options)
	if err != nil {
		return fmt.Errorf("apply %s %s: %w", object.GetKind(), object.GetName(), err)
	}
	return nil
}
